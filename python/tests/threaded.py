"""A module whose import leaves a thread running."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
