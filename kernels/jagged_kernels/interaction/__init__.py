"""Operations between features of a user, over jagged tensors.

One file an operation: the public function, its checks, reference and native implementation, and
its registration; the kernel is beside it in `triton_<operation>.py`. The paper calls them *Jagged
Feature Interaction Kernels* (arXiv 2409.15373).
"""
