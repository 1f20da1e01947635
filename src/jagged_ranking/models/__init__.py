"""The ranking models. They share embeddings, head, features and training, and differ in how
candidates are answered from a history, which is a file of `encoders`.
"""
