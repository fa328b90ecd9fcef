"""De-duplication: finds copies of test images among training images, and removes them."""
