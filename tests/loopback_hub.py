"""A Hugging Face Hub on loopback: the front that is asked, and the storage it redirects to."""
import hashlib
import http.server
import re
import threading


class Hub:
    """Serves files, {"owner/name/file": bytes}, and notes what was asked for.

    Faults are lists by file name: statuses, sent by the front instead of an answer, and what the
    storage does wrong: "cut" sends half of what it announces, "stall" does too and then waits,
    "cut chunks" breaks off an answer without a length, "damage" changes a byte. Each is used
    up by one request, but [fault, "always"] lasts.
    """

    def __init__(self):
        self.files, self.statuses, self.faults = {}, {}, {}
        self.instead = {}                         # what the front sends: {file name: (status,
                                                  # headers, content)}
        self.token, self.takes_ranges, self.names_sha256 = None, True, True
        self.requests = []                        # (server, file name, headers)
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.front, self.storage = Server(self), Server(self)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.front.server_port}"

    def ranges(self, name):
        """The Range headers of the requests for a file's bytes, one by one."""
        return [headers.get("Range") for server, what, headers in self.requests
                if what == name and server == "storage"]

    def next_fault(self, faults, name):
        left = faults.get(name, [])
        if not left:
            return None
        return left[0] if left[1:] == ["always"] else left.pop(0)

    def close(self):
        self.go_on.set()
        for server in self.front, self.storage:
            server.shutdown()
            server.server_close()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True                # or every answer takes 40 ms

    def log_message(self, *arguments):
        pass

    def answer(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def do_GET(self):
        hub, name = self.server.hub, self.path.rpartition("/")[2]
        at_front = "/resolve/main/" in self.path
        hub.requests.append(("front" if at_front else "storage", name, self.headers))
        self.front(hub, name) if at_front else self.storage(hub, name)

    def front(self, hub, name):
        """Redirects, with headers as huggingface.co sends them: 302 to another host for what is
        in Git LFS, with its SHA-256; 307 within the host for the rest, with Git's own hash."""
        status = hub.next_fault(hub.statuses, name)
        content = hub.files.get(self.path[1:].replace("/resolve/main/", "/"))
        if not status and hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            status = 401
        elif not status and content is None:
            status = 404
        if name in hub.instead:
            status, headers, content = hub.instead[name]
            self.answer(status, Content_Length=len(content), **headers)
            return self.wfile.write(content)
        if status:
            return self.answer(status, Content_Length=0, Retry_After=3600)
        place = self.path.replace("/resolve/main/", "/")
        if name.endswith(".safetensors") and hub.names_sha256:
            sha256 = hashlib.sha256(content).hexdigest()
            self.answer(302, X_Linked_ETag=f'"{sha256}"', X_Linked_Size=len(content),
                        X_Repo_Commit="0" * 40, Content_Length=0,
                        Location=f"http://127.0.0.1:{hub.storage.server_port}/bucket{place}")
        else:
            sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            linked = {"X-Linked-ETag": f'"{sha1}"', "X-Linked-Size": len(content)}
            self.answer(307, ETag=f'"{sha1}"', Content_Length=0,
                        Location=f"/api/resolve-cache{place}",
                        **(linked if hub.names_sha256 else {}))

    def storage(self, hub, name):
        content = hub.files["/".join(self.path.split("/")[-3:])]
        fault = hub.next_fault(hub.faults, name)
        size, start = len(content), 0
        if fault == "cut chunks":
            self.answer(200, Transfer_Encoding="chunked")
            self.wfile.write(b"10\r\n" + content[:16] + b"\r\n")
            self.close_connection = True
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and hub.takes_ranges:
            start = int(asked[1])
            if start >= size:
                return self.answer(416, Content_Range=f"bytes */{size}", Content_Length=0)
            self.answer(206, Content_Range=f"bytes {start}-{size - 1}/{size}",
                        Content_Length=size - start)
        else:
            self.answer(200, Accept_Ranges="bytes", Content_Length=size)
        body = content[start:]
        if fault == "damage":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault in ("cut", "stall"):
            self.wfile.write(body[:(len(body) + 1) // 2])
            if fault == "stall":
                hub.stalled.set()
                hub.go_on.wait(30)
            self.close_connection = True
        else:
            self.wfile.write(body)
