"""Inference: prediction, exporting, scoring, word alignment, reranking, evaluation, metrics and analyses."""
