"""Any environment registered with the Gymnasium package, as a text environment."""
