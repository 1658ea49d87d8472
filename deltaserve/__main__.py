from deltaserve.cli import main

main()
