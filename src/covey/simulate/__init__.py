"""How long a step would take on machines that are not rented yet: figures of one device, and a simulation of many."""
