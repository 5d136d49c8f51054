"""What is measured on a GPU, in one command: `scripts/gpu`."""
