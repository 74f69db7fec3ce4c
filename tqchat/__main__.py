from tqchat.cli import main

raise SystemExit(main())
