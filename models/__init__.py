"""Networks, losses and selection arithmetic: pure torch, no Flower, no files of data, no settings."""
