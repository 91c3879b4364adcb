"""What memory there is, what it is planned for, and the page pool's tensor."""
