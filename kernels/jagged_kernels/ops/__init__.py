"""Operations beside attention: the API with its specification, the kernel next to it."""
