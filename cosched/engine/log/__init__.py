"""The format of the decision log, its files, and what can be read of it. Nothing of SGLang."""
