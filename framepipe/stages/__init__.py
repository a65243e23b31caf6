"""The built-in stages, one file each; the module's name is the YAML name."""
