"""Inference: prediction, export, streaming, scoring, word alignment, reranking, metrics, analyses and explanations."""
