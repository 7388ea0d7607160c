"""SGLang: versions go into running servers through its plugins and custom loaders. Importing this does not import SGLang."""
