"""Inference: prediction, scoring, reranking, evaluation and metrics."""
