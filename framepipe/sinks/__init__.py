"""The built-in sinks, one file each; the module's name is the YAML name."""
