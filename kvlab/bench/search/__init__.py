"""What scoring many configs costs, beside kvpress and beside the least that the model itself would take."""
