//! `npuhal serve`: the OpenAI-compatible server, and the workers it starts.

use crate::Host;
use crate::args::{ServeArgs, SessionArgs, default_model};
use crate::environment::Setting;
use crate::error::CliError;
use crate::session::{locate, open_model, prepare_at, registry, request};
use crate::terminal::complain;
use npuhal_core::stage::{Placement, Session};
use npuhal_models::package::{Scanned, is_package, look, scan};
use npuhal_models::prompter::Prompter;
use npuhal_models::source::Format;
use npuhal_models::store::{Presence, StoredKind};
use npuhal_models::window::Overflow;
use npuhal_models::{Catalogue, Store};
use npuhal_registry::AddonSources;
use npuhal_registry::private::stated_model_type;
use npuhal_server::job::{Load, Resident};
use npuhal_server::worker::{self, Loaded, Loader};
use npuhal_server::{ApiKey, FleetOptions, Hosting, InProcess, ModelEntry, ServerConfig};
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// What a worker needs of this process's command line.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct WorkerSettings {
    session: SessionArgs,
    models_dir: Option<PathBuf>,
    addons: Vec<PathBuf>,
    context_overflow: Option<Overflow>,
}

pub(crate) fn serve(host: &Host, args: ServeArgs) -> Result<(), CliError> {
    let listen = SocketAddr::new(args.host, args.port);
    let api_key = api_key(host, &args)?;
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificates), Some(key)) => Some((certificates.clone(), key.clone())),
        _ => None,
    };
    // Found out before a port is opened, and by the process that can say so at a terminal.
    let models = models(host, &args.model)?;
    let settings = WorkerSettings {
        session: args.session.clone(),
        models_dir: host.global.models_dir.clone(),
        addons: host.global.addon.clone(),
        context_overflow: args.context_overflow,
    };
    let hosting = hosting(host, &args, &settings)?;
    check_session(host, &settings, &hosting, &typed_folders(&args.model))?;
    let names: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
    host.voice.note(format_args!("Installed models: {}", names.join(", ")));
    let scheme = if tls.is_some() { "https" } else { "http" };
    let seconds = Duration::from_secs;
    let config = ServerConfig {
        listen,
        api_key,
        origins: origins(&args.cors_origin)?,
        tls,
        fleet: FleetOptions {
            models,
            default: 0,
            max_resident: args.max_resident as usize,
            parallel: args.parallel,
            hosting,
            self_test: !args.no_self_test,
            load_limit: seconds(600),
            stall_limit: seconds(args.stall_timeout),
        },
        prewarm: !args.no_prewarm,
        queue_capacity: args.queue_capacity as usize,
        rate_limit_per_minute: args.rate_limit_per_minute,
        rate_limit_local: args.rate_limit_local,
        max_body_bytes: args.max_body_bytes as usize,
        max_chars: args.max_chars as usize,
        request_limit: seconds(args.request_timeout),
        body_limit: seconds(args.body_timeout),
        drain_limit: seconds(args.graceful_shutdown_timeout),
        max_connections: 1024,
        heartbeat: Duration::from_millis(args.heartbeat_ms),
    };
    let (stop, stopped) = npuhal_server::stop_signal();
    let again = AtomicBool::new(false);
    let on_signal = move || {
        if again.swap(true, Ordering::SeqCst) {
            std::process::exit(1);
        }
        complain("npuhal: finishing the requests that were admitted; a second signal ends at once");
        stop.stop();
    };
    if let Err(error) = ctrlc::set_handler(on_signal) {
        tracing::warn!(%error, "a signal ends the server without finishing what was admitted");
    }
    let voice = host.voice;
    npuhal_server::run(config, stopped, |started| {
        voice.note(format_args!("OpenAI-compatible API: {scheme}://{}/v1", started.address));
    })?;
    Ok(())
}

/// Finds out usage errors of the session, and folders that are no models, before a port is opened. Add-ons are loaded by a
/// process of their own for that: what crashes in them does not take the server with it.
fn check_session(
    host: &Host,
    settings: &WorkerSettings,
    hosting: &Hosting,
    folders: &[PathBuf],
) -> Result<(), CliError> {
    let (addons, _) = AddonSources::of_process(settings.addons.clone()).files();
    let Hosting::Process { program, arguments } = hosting else { return check_here(host, settings, folders) };
    if addons.is_empty() {
        return check_here(host, settings, folders);
    }
    let mut command = Command::new(program);
    command.args(arguments).arg("--check").args(folders).stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.status().map_err(CliError::Program)?;
    match status.code().map(u8::try_from) {
        Some(Ok(0)) => Ok(()),
        // It has said why.
        Some(code) => Err(CliError::Verdict(code.unwrap_or(1))),
        None => {
            let files: Vec<String> = addons.iter().map(|file| file.display().to_string()).collect();
            Err(CliError::AddonsCrashed { status: status.to_string(), files: files.join(", ") })
        }
    }
}

fn check_here(host: &Host, settings: &WorkerSettings, folders: &[PathBuf]) -> Result<(), CliError> {
    let registry = registry(host)?;
    request(&registry, &settings.session)?;
    folders.iter().try_for_each(|folder| open_model(host, &registry, folder.as_os_str(), false).map(drop))
}

/// `npuhal worker --check`.
pub(crate) fn check(host: &Host, settings: &str, folders: &[PathBuf]) -> Result<(), CliError> {
    let settings = read_settings(settings)?;
    check_here(&settings.host(host), &settings, folders)
}

/// The key clients need: the given one; a random one, shown once, where others than this machine can connect.
fn api_key(host: &Host, args: &ServeArgs) -> Result<Option<ApiKey>, CliError> {
    if let Some(Setting { value, source }) = Setting::of("--api-key", args.api_key.as_deref(), "NPUHAL_API_KEY")? {
        return ApiKey::new(value).map(Some).map_err(|error| CliError::Usage(format!("{source}: {error}")));
    }
    if args.host.is_loopback() {
        return Ok(None);
    }
    let key = ApiKey::random().map_err(|error| CliError::Usage(format!("{error}; set a key with --api-key")))?;
    if args.tls_cert.is_none() {
        host.voice.note("Others than this machine can connect, and without TLS what they send can be read on the way.");
    }
    complain(format_args!("API key (shown once; --api-key sets your own): {}", key.reveal()));
    Ok(Some(key))
}

/// Origins as browsers send them: in small letters, without a slash at the end.
fn origins(given: &[String]) -> Result<Vec<String>, CliError> {
    if given.is_empty() {
        return Ok(["http://127.0.0.1:3000", "http://localhost:3000"].map(str::to_owned).to_vec());
    }
    let origin = |given: &String| {
        let origin = given.trim_end_matches('/').to_ascii_lowercase();
        // Pages of files have the origin 'null'.
        if origin == "null" || origin.split_once("://").is_some_and(|(scheme, host)| is_scheme(scheme) && is_host(host))
        {
            return Ok(origin);
        }
        Err(CliError::Usage(format!(
            "--cors-origin '{given}': wanted SCHEME://HOST or SCHEME://HOST:PORT, as a browser sends it (e.g. \
             http://localhost:5173); '*' is not one: each origin is named by itself"
        )))
    };
    given.iter().map(origin).collect()
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

fn is_host(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && !"/?#@*".contains(c))
}

fn hosting(host: &Host, args: &ServeArgs, settings: &WorkerSettings) -> Result<Hosting, CliError> {
    if args.in_process {
        let host = host.clone();
        let settings = settings.clone();
        let run = move |socket: std::os::unix::net::UnixStream| {
            let loader = WorkerLoader { host: host.clone(), settings: settings.clone() };
            match worker::halves(socket) {
                Ok((orders, reports)) => end(worker::serve(orders, reports, &mut { loader })),
                Err(error) => complain(format_args!("npuhal: the worker's socket: {error}")),
            }
        };
        return Ok(Hosting::Thread(InProcess(Arc::new(run))));
    }
    let program = std::env::current_exe().map_err(CliError::Program)?;
    let mut arguments: Vec<OsString> = vec!["worker".into(), "--settings".into()];
    arguments.push(serde_json::to_string(settings).map_err(|error| CliError::Usage(error.to_string()))?.into());
    if host.global.quiet {
        arguments.push("--quiet".into());
    }
    arguments.extend((0..host.global.verbose).map(|_| OsString::from("--verbose")));
    Ok(Hosting::Process { program, arguments })
}

fn end(result: Result<(), worker::WorkerError>) {
    if let Err(error) = result {
        complain(format_args!("npuhal: {error}"));
    }
}

/// `npuhal worker`, which the server starts: the process that owns the device. Its standard input is the socket.
pub(crate) fn work(host: &Host, settings: &str) -> Result<(), CliError> {
    let settings = read_settings(settings)?;
    // Signals of the terminal reach the whole group; the server says when it is time.
    if let Err(error) = ctrlc::set_handler(|| {}) {
        tracing::warn!(%error, "a signal ends the worker in the middle of its work");
    }
    let no_socket = |error: std::io::Error| {
        CliError::Usage(format!(
            "worker: stdin is no socket ({error}); a worker is started by `npuhal serve`, not by hand"
        ))
    };
    let socket = npuhal_server::worker::socket_of_stdin().map_err(no_socket)?;
    let (orders, reports) = worker::halves(socket).map_err(no_socket)?;
    let mut loader = WorkerLoader { host: settings.host(host), settings };
    Ok(worker::serve(orders, reports, &mut loader)?)
}

fn read_settings(settings: &str) -> Result<WorkerSettings, CliError> {
    serde_json::from_str(settings).map_err(|error| {
        CliError::Usage(format!("worker: {error}; a worker is started by `npuhal serve`, not by hand"))
    })
}

impl WorkerSettings {
    /// `host` with the flags that the server was given.
    fn host(&self, host: &Host) -> Host {
        let mut host = host.clone();
        host.global.models_dir.clone_from(&self.models_dir);
        host.global.addon.clone_from(&self.addons);
        host
    }
}

struct WorkerLoader {
    host: Host,
    settings: WorkerSettings,
}

impl Loader for WorkerLoader {
    fn load(&mut self, load: &Load) -> Result<Loaded, String> {
        self.open(Path::new(&load.model), load.sequences).map_err(|error| error.to_string())
    }
}

impl WorkerLoader {
    fn open(&mut self, model: &Path, sequences: u32) -> Result<Loaded, CliError> {
        let mut session = self.settings.session.clone();
        session.sequences = Some(sequences);
        let plan = prepare_at(&self.host, model, &session)?.choose_any(&self.host)?;
        let tokenizer = plan.tokenizer(&self.host)?;
        let prompter = Prompter::new(&plan.model, &tokenizer);
        let is_narrow = plan.model.format() == Format::Xdna1Package;
        let usual = if is_narrow { Overflow::Truncate } else { Overflow::Error };
        let overflow = self.settings.context_overflow.unwrap_or(usual);
        let session = plan.open()?;
        let placement = match &session {
            Session::Stepper(stepper) => stepper.placement(),
            Session::Generator(_) => plan.choice.service.placement.clone(),
        };
        let context = match &session {
            Session::Stepper(stepper) => stepper.capacity().positions as usize,
            Session::Generator(generator) => generator.max_context() as usize,
        };
        let parallel = match &session {
            Session::Stepper(stepper) => stepper.capacity().sequences,
            Session::Generator(_) => 1,
        };
        let (cpu_layers, npu_layers) = layers(&placement);
        let resident = Resident {
            route: plan.choice.route.name().to_owned(),
            device: plan.choice.service.device.clone(),
            context,
            npu_layers,
            cpu_layers,
            parallel,
        };
        Ok(Loaded { session, tokenizer, prompter, overflow, resident })
    }
}

/// Layers on the CPU, and elsewhere.
fn layers(placement: &[Placement]) -> (usize, usize) {
    let (cpu, npu): (Vec<_>, Vec<_>) = placement.iter().partition(|part| part.device.starts_with("cpu"));
    let count = |parts: Vec<&Placement>| parts.iter().map(|part| part.layers.len()).sum();
    (count(cpu), count(npu))
}

/// The models that are named, or else all that are here; where there is none, the usual one is fetched.
fn models(host: &Host, named: &[OsString]) -> Result<Vec<ModelEntry>, CliError> {
    let mut entries: Vec<ModelEntry> = Vec::new();
    let mut add = |entry: ModelEntry| {
        if entries.iter().all(|other| other.id != entry.id) {
            entries.push(entry);
            Ok(())
        } else {
            Err(CliError::Usage(format!("two models would have the id '{}'; rename one of the files", entry.id)))
        }
    };
    for name in named {
        add(named_model(host, name)?)?;
    }
    if named.is_empty() {
        let store = Store::locate(host.global.models_dir.as_deref())?;
        for file in store.list(Catalogue::builtin())? {
            let is_whole = match file.kind {
                StoredKind::Catalogued(presence) => !matches!(presence, Presence::WrongSize { .. }),
                StoredKind::Foreign => true,
                _ => false,
            };
            if is_whole {
                add(entry(&file.name, None, &file.path))?;
            }
        }
        for package in scan(store.folder())?.packages {
            add(of_package(&package))?;
        }
    }
    if entries.is_empty() {
        entries.push(named_model(host, OsStr::new(default_model()))?);
    }
    if let Some(usual) = entries.iter().position(|entry| named.is_empty() && entry.id == default_model()) {
        entries[..=usual].rotate_right(1);
    }
    Ok(entries)
}

/// The named folders that state a model type. What npuhal cannot read may be a model of an add-on.
fn typed_folders(named: &[OsString]) -> Vec<PathBuf> {
    let folders = named.iter().map(Path::new);
    folders.filter(|folder| folder.is_dir() && stated_model_type(folder).is_some()).map(Path::to_owned).collect()
}

fn named_model(host: &Host, name: &OsStr) -> Result<ModelEntry, CliError> {
    let typed = || typed_folders(&[name.to_owned()]).pop();
    let path = locate(host, name).or_else(|error| typed().ok_or(error))?;
    if is_package(&path)
        && let Ok(package) = look(&path)
    {
        return Ok(of_package(&package));
    }
    let catalogued = name.to_str().and_then(|name| Catalogue::builtin().find(name)).map(|entry| entry.name.clone());
    // Names of directories have no endings, only dots.
    let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
    let stem = stem.unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(entry(&catalogued.unwrap_or(stem), None, &path))
}

fn of_package(package: &Scanned) -> ModelEntry {
    entry(&package.model_id, Some(&package.display_name), &package.path)
}

/// Ids are what clients write: without the ending of a file.
fn entry(name: &str, display_name: Option<&str>, path: &Path) -> ModelEntry {
    let id = name.strip_suffix(".gguf").unwrap_or(name).to_owned();
    let known = || Catalogue::builtin().find(&id).map(|entry| entry.display_name.clone());
    let display_name = display_name.map(str::to_owned).or_else(known);
    let modified = path.metadata().and_then(|metadata| metadata.modified()).ok();
    let created = modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    ModelEntry {
        display_name: display_name.unwrap_or_else(|| id.clone()),
        path: path.to_string_lossy().into_owned(),
        created: created.map_or(0, |time| time.as_secs()),
        id,
    }
}

/// Loopback unless told otherwise.
pub(crate) const DEFAULT_HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
