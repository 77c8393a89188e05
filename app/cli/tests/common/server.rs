//! A running `npuhal serve`, and a plain client that shows what goes over the wire.

use super::Home;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ten times what anything takes that is waited for.
pub(crate) const HANG_GUARD: Duration = Duration::from_secs(60);

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const TEXT: &str = "/v1/completions";

pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: SocketAddr,
    said: Arc<Mutex<String>>,
    // Reads to the end, so that the server never waits for its own messages.
    log: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts it with `arguments` on a free port of this machine, and waits until it listens.
    pub(crate) fn start(home: &Home, arguments: &[&str]) -> Self {
        let mut command = home.npuhal(&["serve", "--port", "0"]);
        command.env_remove("NPUHAL_API_KEY").args(arguments);
        Self::of(command)
    }

    pub(crate) fn of(mut command: Command) -> Self {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = address(&mut log, &mut said);
        let said = Arc::new(Mutex::new(said));
        let log = std::thread::spawn({
            let said = Arc::clone(&said);
            move || keep(&mut log, &said)
        });
        Self { child, address, said, log: Some(log) }
    }

    /// What it has said on stderr so far, up to a limit.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) fn wait_until_ready(&self) {
        let started = Instant::now();
        while self.get("/ready").status != 200 {
            assert!(started.elapsed() < HANG_GUARD, "{:?}: {}", self.get("/ready"), self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until `/ready` answers something that `is_it` likes.
    #[track_caller]
    pub(crate) fn wait_for(&self, is_it: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let ready = self.get("/ready").json();
            if is_it(&ready) {
                return ready;
            }
            assert!(started.elapsed() < HANG_GUARD, "{ready}: {}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(HANG_GUARD)).unwrap();
        socket.set_nodelay(true).unwrap();
        socket
    }

    pub(crate) fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut socket = self.connect();
        socket.write_all(head.as_bytes()).unwrap();
        // A server that has refused the head does not wait for the body.
        let _ = socket.write_all(body);
        Answer::read(socket)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        self.send(&post_head(path, body.len()), body.as_bytes())
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) fn open(&self, path: &str, body: &Value) -> Response {
        let body = body.to_string();
        let mut socket = self.connect();
        socket.write_all(format!("{}{body}", post_head(path, body.len())).as_bytes()).unwrap();
        Response::read(socket).expect("a head")
    }

    /// The value of a line of `/metrics` that begins with `name`; 0 where there is none.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").body).unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its workers.
    pub(crate) fn workers(&self) -> Vec<u32> {
        // A process is the child of the thread that started it.
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let children = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).ok());
        let children: String = children.collect();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    pub(crate) fn worker(&self) -> u32 {
        *self.workers().first().expect("there is a worker")
    }

    /// Waits for its end; returns what it has said.
    pub(crate) fn wait(mut self) -> String {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}: {}", self.said());
                self.log.take().unwrap().join().unwrap();
                return self.said();
            }
            assert!(started.elapsed() < HANG_GUARD, "the server does not end: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Asks it to end and waits for it.
    pub(crate) fn end(self) -> String {
        signal(self.child.id(), rustix::process::Signal::TERM);
        self.wait()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended; a test that failed leaves none behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(process: u32, signal: rustix::process::Signal) {
    let process = rustix::process::Pid::from_raw(process.try_into().unwrap()).unwrap();
    rustix::process::kill_process(process, signal).unwrap();
}

fn address(log: &mut impl BufRead, said: &mut String) -> SocketAddr {
    loop {
        let start = said.len();
        assert!(log.read_line(said).unwrap() > 0, "the server ended: {said}");
        if let Some((_, rest)) = said[start..].split_once("API: ") {
            let address = rest.trim_end().trim_end_matches("/v1");
            let address = address.trim_start_matches("http://").trim_start_matches("https://");
            return address.parse().unwrap();
        }
    }
}

fn keep(log: &mut impl BufRead, said: &Mutex<String>) {
    const LIMIT: usize = 256 << 10;
    let mut line = Vec::new();
    while log.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let mut said = said.lock().unwrap();
        if said.len() < LIMIT {
            said.push_str(&String::from_utf8_lossy(&line));
        }
        line.clear();
    }
}

pub(crate) fn post_head(path: &str, len: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len}\r\n\r\n"
    )
}

/// A request for a short greedy answer, with `extra` fields.
pub(crate) fn chat(extra: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}), extra)
}

/// `body` with the fields of `extra`.
pub(crate) fn with(mut body: Value, extra: Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// An answer that was read to the end of its connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    #[track_caller]
    pub(crate) fn read(mut socket: impl Read) -> Self {
        let mut bytes = Vec::new();
        // A reset after the answer is how a connection with an unread body ends.
        let _ = socket.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = bytes[end + 4..].to_vec();
        if is_chunked(&head) {
            let mut whole = Vec::new();
            // A stream that was broken off ends where it was.
            let _ = Chunked::new(body.as_slice()).read_to_end(&mut whole);
            body = whole;
        }
        Self { status, head, body }
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn events(&self) -> Vec<String> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// The value of the header `name`.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (held, value) = line.split_once(':')?;
            held.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

fn is_chunked(head: &str) -> bool {
    head.to_ascii_lowercase().contains("transfer-encoding: chunked")
}

/// An answer whose body is read as it comes.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    body: BufReader<Box<dyn Read + Send>>,
}

impl Response {
    pub(crate) fn read(socket: impl Read + Send + 'static) -> std::io::Result<Self> {
        let mut reader = BufReader::new(socket);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
        let body: Box<dyn Read + Send> =
            if is_chunked(&head) { Box::new(Chunked::new(reader)) } else { Box::new(reader) };
        Ok(Self { status, head, body: BufReader::new(body) })
    }

    /// The data of the next server-sent event; `None` at the end, also at that of a stream that was broken off.
    pub(crate) fn event(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            match self.body.read_line(&mut line) {
                Ok(read) if read > 0 => {}
                _ => return None,
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }

    /// The events that are left.
    pub(crate) fn events(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.event()).collect()
    }

    /// The rest of the body.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A connection that breaks off ends the body, too.
        let _ = self.body.read_to_end(&mut rest);
        rest
    }
}

/// What is in a chunked body.
struct Chunked<R> {
    reader: R,
    left: usize,
    has_ended: bool,
}

impl<R: BufRead> Chunked<R> {
    fn new(reader: R) -> Self {
        Self { reader, left: 0, has_ended: false }
    }

    fn next_chunk(&mut self) -> std::io::Result<()> {
        let mut line = String::new();
        while line.trim().is_empty() {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let length = usize::from_str_radix(line.trim(), 16);
        self.left = length.map_err(|_| std::io::Error::other(format!("'{line}' is no length of a chunk")))?;
        self.has_ended = self.left == 0;
        Ok(())
    }
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 && !self.has_ended {
            self.next_chunk()?;
        }
        if self.has_ended {
            return Ok(0);
        }
        let wanted = buffer.len().min(self.left);
        let read = self.reader.read(&mut buffer[..wanted])?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= read;
        Ok(read)
    }
}

/// A server of the home's small model, whose random weights would not pass a self-test.
pub(crate) fn serve(home: &Home, arguments: &[&str]) -> Server {
    let model = home.model();
    let mut all = vec!["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1"];
    all.extend(arguments);
    let server = Server::start(home, &all);
    server.wait_until_ready();
    server
}

/// Begins a long stream and reads until its first piece.
pub(crate) fn begin_stream(server: &Server, body: &Value) -> Response {
    let mut response = server.open(CHAT, &with(body.clone(), json!({"stream": true})));
    loop {
        let event = response.event().expect("the stream goes on");
        let chunk: Value = serde_json::from_str(&event).unwrap();
        if chunk["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
            return response;
        }
    }
}

/// As [`serve`], with a model that is slow enough to be met in the middle of an answer.
pub(crate) fn serve_slowly(home: &Home, arguments: &[&str]) -> Server {
    let model = home.slow_model(1536);
    let mut all = vec!["-m", model.to_str().unwrap(), "--no-self-test", "--threads", "1", "--numerics", "exact"];
    all.extend(arguments);
    let server = Server::start(home, &all);
    server.wait_until_ready();
    server
}

/// Stops a process until it is dropped, as one that hangs.
pub(crate) struct Frozen(u32);

impl Frozen {
    pub(crate) fn new(process: u32) -> Self {
        signal(process, rustix::process::Signal::STOP);
        Self(process)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // It may have been killed meanwhile.
        if let Some(process) = self.0.try_into().ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::CONT);
        }
    }
}
