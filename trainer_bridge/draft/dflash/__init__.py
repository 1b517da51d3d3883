"""DFlash (arXiv 2602.06036): one draft pass for a whole block of tokens."""
