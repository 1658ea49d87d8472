//! What benchmarks of routers share: this router and the stock ones as processes of their own, on a core
//! of their own, and a client that times answers.

// Each benchmark uses a part of it.
#![allow(dead_code)]

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use router_policies::config::Config;
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROUTER_CORE: &str = "1";
const LOAD_CORES: &str = "0,2-63";
const SERVE: &str = "--serve-as-router";

pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

/// Whether ROUTER_BENCH_ONLY lets a measurement run.
pub fn wanted(name: &str) -> bool {
    std::env::var("ROUTER_BENCH_ONLY").map_or(true, |only| name.contains(&only))
}

/// The load and the mock workers keep off the routers' core.
pub fn keep_off() {
    let own = std::process::id().to_string();
    let _ = Command::new("taskset")
        .args(["-a", "-cp", LOAD_CORES, &own])
        .output();
}

/// True where this process was started to be a router, and has been.
pub fn served() -> bool {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == SERVE);
    if let Some(config) = at.and_then(|at| arguments.get(at + 1)) {
        serve(config);
    }
    at.is_some()
}

/// The router alone in this process, as `deltaserve route` runs it.
fn serve(config: &str) {
    let config: Config = serde_json::from_str(config).expect("a configuration");
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async {
            let server = Server::bind(config).await.expect("binds");
            server.serve(std::future::pending()).await;
        });
}

/// Where routers of ours run under callgrind, which counts their instructions: the folder of its files.
fn counted_in() -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os(
        "ROUTER_BENCH_INSTRUCTIONS",
    )?))
}

pub struct Quantiles(Vec<f64>);

impl Quantiles {
    pub fn new(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn at(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0
            .get((last as f64 * share).round() as usize)
            .copied()
            .unwrap_or(f64::NAN)
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Router {
    Direct,
    Ours,
    /// This router as another commit has it.
    Before,
    Sglang,
    Smg,
}

pub struct Arm {
    pub name: String,
    pub url: String,
    process: Option<Child>,
}

impl Drop for Arm {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Arm {
    /// Processor seconds used so far.
    pub fn cpu_s(&self) -> f64 {
        let Some(process) = &self.process else {
            return 0.0;
        };
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
        let ticks = |i: usize| {
            fields
                .get(i)
                .and_then(|f| f.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        (ticks(11) + ticks(12)) / 100.0
    }

    /// Instructions in user space since this was asked last, where they are counted: also left for
    /// `callgrind_annotate` as a file of this arm and `part`.
    pub fn instructions(&self, part: &str) -> Option<f64> {
        let process = self.process.as_ref()?.id();
        let folder = counted_in()?;
        let control = Command::new("callgrind_control")
            .args(["--dump", &process.to_string()])
            .output()
            .ok()?;
        control.status.success().then_some(())?;
        let dump = format!("{process}.out.");
        let files = std::fs::read_dir(&folder).ok()?.flatten();
        let is_dump = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(&dump);
        let dumped = files
            .map(|file| file.path())
            .find(|path| path.file_name().is_some_and(is_dump))?;
        let kept = format!("{} {part}", self.name).replace([',', ' '], "_");
        let kept = folder.join(kept);
        std::fs::rename(dumped, &kept).ok()?;
        let text = std::fs::read_to_string(kept).ok()?;
        let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
        total?.trim().parse().ok()
    }

    pub fn rss_mib(&self) -> f64 {
        let Some(process) = &self.process else {
            return 0.0;
        };
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .unwrap_or("");
        line.split_whitespace()
            .nth(1)
            .and_then(|kib| kib.parse::<f64>().ok())
            .unwrap_or(0.0)
            / 1024.0
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").port()
}

/// `command` on the routers' core, its instructions counted in files of `folder` if there is one.
fn pinned(command: &[String], folder: Option<PathBuf>) -> Command {
    let has_taskset = Command::new("taskset").arg("--version").output().is_ok();
    let mut line = Vec::new();
    if has_taskset {
        line.extend(["taskset", "-c", ROUTER_CORE].map(str::to_owned));
    }
    let is_counted = folder.is_some();
    if let Some(folder) = folder {
        let file = folder.join("%p.out").display().to_string();
        line.extend(["valgrind", "--tool=callgrind"].map(str::to_owned));
        line.push(format!("--callgrind-out-file={file}"));
    }
    line.extend_from_slice(command);
    let mut command = Command::new(&line[0]);
    if is_counted {
        // Else a large copy counts as one instruction for each of its bytes.
        let tunable = "glibc.cpu.x86_rep_movsb_threshold=1073741824";
        command.env("GLIBC_TUNABLES", tunable);
    }
    command
        .args(&line[1..])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Starts a router before workers, the first of which prefills for the others if `separated`; none where
/// that router is not there, or does not start. `ours` is this router's configuration beyond that,
/// `stock_policy` the policy of the stock ones.
pub async fn start(
    router: Router,
    workers: &[&str],
    separated: bool,
    ours: Value,
    stock_policy: &str,
) -> Option<Arm> {
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let name = match router {
        Router::Direct => {
            return Some(Arm {
                name: "direct".to_owned(),
                url: (*workers.last()?).to_owned(),
                process: None,
            });
        }
        Router::Ours => "deltaserve",
        Router::Before => "deltaserve before",
        Router::Sglang => "sglang-router",
        Router::Smg => "smg",
    };
    let command: Vec<String> = match router {
        Router::Ours | Router::Before => {
            let specs: Vec<Value> = workers
                .iter()
                .enumerate()
                .map(|(i, worker)| match (separated, i) {
                    (true, 0) => {
                        json!({"url": worker, "role": "prefill", "bootstrap_port": 8998})
                    }
                    (true, _) => json!({"url": worker, "role": "decode"}),
                    _ => json!({"url": worker}),
                })
                .collect();
            let mut config = ours;
            config["port"] = port.into();
            config["workers"] = specs.into();
            config["threads"] = 1.into();
            if counted_in().is_some() {
                // Counted, a second has few requests, and what the router does every second is not theirs.
                config["load_interval_s"] = 0.into();
                config["health_interval_s"] = 3600.into();
            }
            let program = match router {
                Router::Before => std::env::var("ROUTER_BENCH_BEFORE").ok()?,
                _ => std::env::current_exe().ok()?.display().to_string(),
            };
            vec![program, SERVE.to_owned(), config.to_string()]
        }
        _ => {
            let (variable, module) = match router {
                Router::Smg => ("ROUTER_BENCH_SMG", "smg.launch_router"),
                _ => ("ROUTER_BENCH_SGLANG_ROUTER", "sglang_router.launch_router"),
            };
            let python = std::env::var(variable).ok()?;
            let mut command = vec![python, "-m".to_owned(), module.to_owned()];
            let mut add = |text: &str| command.extend(text.split(' ').map(str::to_owned));
            add(&format!(
                "--host 127.0.0.1 --port {port} --prometheus-port {} --log-level error",
                free_port()
            ));
            if separated {
                add(&format!(
                    "--pd-disaggregation --prefill {} 8998",
                    workers[0]
                ));
                add(&format!("--decode {} --policy {stock_policy}", workers[1]));
            } else {
                add(&format!("--policy {stock_policy} --worker-urls"));
                workers.iter().for_each(|worker| add(worker));
            }
            command
        }
    };
    let is_ours = matches!(router, Router::Ours | Router::Before);
    let folder = counted_in().filter(|_| is_ours);
    let mut arm = Arm {
        name: name.to_owned(),
        url,
        process: Some(pinned(&command, folder).spawn().ok()?),
    };
    let deadline = Instant::now() + Duration::from_secs(90);
    while Instant::now() < deadline {
        if let Some(process) = &mut arm.process
            && let Ok(Some(status)) = process.try_wait()
        {
            println!("{name}: ended with {status}: {}", command.join(" "));
            return None;
        }
        if let Some(mut connection) = Connection::open(&arm.url).await {
            let answer = connection
                .post(Bytes::from_static(b"{\"input_ids\":[1]}"))
                .await;
            if answer.is_some_and(|answer| answer.status == 200) {
                return Some(arm);
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("{name}: not ready after 90 s");
    None
}

pub struct Answer {
    pub status: u16,
    pub first_s: f64,
    pub whole_s: f64,
}

pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    host: String,
}

impl Connection {
    pub async fn open(url: &str) -> Option<Self> {
        let host = url.strip_prefix("http://")?.to_owned();
        let socket = tokio::net::TcpStream::connect(&host).await.ok()?;
        socket.set_nodelay(true).ok()?;
        let (sender, connection) = handshake(TokioIo::new(socket)).await.ok()?;
        tokio::spawn(connection);
        Some(Self { sender, host })
    }

    pub async fn post(&mut self, body: Bytes) -> Option<Answer> {
        self.post_to("/generate", None, body).await
    }

    /// Posts a turn of a session, if it is of one.
    pub async fn post_to(
        &mut self,
        path: &str,
        session: Option<&str>,
        body: Bytes,
    ) -> Option<Answer> {
        let mut request = Request::post(path)
            .header("host", &self.host)
            .header("content-type", "application/json");
        if let Some(session) = session {
            request = request.header("x-claude-code-session-id", session);
        }
        let request = request.body(Full::from(body)).ok()?;
        let begun = Instant::now();
        self.sender.ready().await.ok()?;
        let mut response = self.sender.send_request(request).await.ok()?;
        let mut first_s = None;
        while let Some(frame) = response.body_mut().frame().await {
            frame.ok()?;
            first_s.get_or_insert_with(|| begun.elapsed().as_secs_f64());
        }
        Some(Answer {
            status: response.status().as_u16(),
            first_s: first_s.unwrap_or_default(),
            whole_s: begun.elapsed().as_secs_f64(),
        })
    }
}
