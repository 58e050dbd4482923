"""YAML files of settings, as trees that know their lines and with the files that they include."""
