"""The ranking models. They share embeddings, head, features and training, and differ in how a
target is answered from a history: `pooler(history JaggedTensor [T, D], target [B, D]) -> [B, D]`.
"""
