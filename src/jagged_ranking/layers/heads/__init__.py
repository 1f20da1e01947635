"""What mixes the fields of a candidate (the answer of its history, itself, features) to logits.

All but `dot` are called with the fields, tensors [C, width], and return [C, tasks].
"""
