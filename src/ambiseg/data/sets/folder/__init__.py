"""A folder of images and of masks by reader."""
