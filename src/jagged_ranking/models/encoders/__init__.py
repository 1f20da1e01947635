"""A file is a model, by its name: nothing else lists them.

Each has an `ENCODER`, an `nn.Module` that is made from a `ModelConfig`, of which it reads what it
has a use for. It is called with the history's tokens (`JaggedTensor` [T, D]), the candidates
(`JaggedTensor` [C, D]) and the batch, in which it finds times, positions and the request of each
candidate, and returns a vector for each candidate [C, D]. What several models share is in
`jagged_ranking.layers`.
"""
