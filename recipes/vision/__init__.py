"""ImageNet, CIFAR-10, MNIST and Fashion-MNIST from a folder of the user's, and networks for them; nothing is downloaded."""
