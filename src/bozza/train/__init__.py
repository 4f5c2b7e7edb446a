"""From a target to a working drafter: data from the target itself, features, training, a checkpoint."""
