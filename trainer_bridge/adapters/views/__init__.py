"""What co-training needs to know of a trainer's model: an adapter per kind of trainer makes a `PolicyView`."""
