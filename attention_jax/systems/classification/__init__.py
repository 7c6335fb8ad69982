"""The classification system: documents, or pairs of texts, to labels."""
