"""The same mathematics as `functional`, in less time and memory. `api.attend` is the public entry point."""
