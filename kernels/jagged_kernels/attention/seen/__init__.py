"""What the mask hides touches nothing: sums over what is seen alone."""
