"""Parts of the governor's benchmark."""
