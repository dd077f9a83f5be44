"""The papers' models on the papers' data: ImageNet, CIFAR-10 and MNIST from a folder of the user's; nothing is downloaded."""
