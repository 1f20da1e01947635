"""The ranking models. They share embeddings, head, features and training, and differ in how
candidates are answered from a history: an encoder is called with the history's tokens
(`JaggedTensor` [T, D]), the candidates (`JaggedTensor` [C, D]) and the batch, in which it finds
times, positions and context, and returns a vector for each candidate [C, D].
"""
