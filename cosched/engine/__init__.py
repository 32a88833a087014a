"""The adapter: the only package, with the patches, that imports SGLang."""
