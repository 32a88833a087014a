"""What machines without a GPU run in place of what SGLang has for one; nothing with a GPU."""
