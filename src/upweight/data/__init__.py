"""Files or hub -> rows -> formats -> token ids."""
