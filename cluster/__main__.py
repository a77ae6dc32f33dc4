from shoal.cluster.cli import main

main()
