"""The built-in sources, one file each; the module's name is the YAML name."""
