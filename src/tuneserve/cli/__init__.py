"""The commands, by what they are about; imported by `tuneserve.__main__` only."""
