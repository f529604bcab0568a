"""The complete reference backend of attnplug, in plain PyTorch."""
