"""Files that people write: the configuration of a run, the settings of the platform and of events; and what is wrong with
them."""
