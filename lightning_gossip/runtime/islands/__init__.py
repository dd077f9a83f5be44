"""Islands at run time: their process groups, and what their ranks say and gather beside DDP."""
