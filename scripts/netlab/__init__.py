"""A network in a box: namespaces with rates, delay and loss."""
