"""How the product is deployed."""
