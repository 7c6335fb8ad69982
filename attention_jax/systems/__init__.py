"""Systems: each bundles a model with its data, its loss and its metrics; `experiment` trains any of them."""
