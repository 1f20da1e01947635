"""Rules, from what is known before a launch: tile shapes, and which kernels take a call."""
