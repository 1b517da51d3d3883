"""What one engine step takes, part by part."""
