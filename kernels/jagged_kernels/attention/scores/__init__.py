"""What is done to scores and probabilities: biases and dropout."""
