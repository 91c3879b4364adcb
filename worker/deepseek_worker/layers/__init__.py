"""The parts a decoder is made of, each with its torch form."""
