//! HTTP over the daemon's Unix socket.

use crate::error::Error;
use api::{Job, Problem};
use reqwest::blocking::{self, Response};
use reqwest::{Method, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A daemon's API.
pub struct Client {
    http: blocking::Client,
    socket: PathBuf,
    /// Nothing is to be changed.
    is_dry: bool,
}

impl Client {
    /// That of the daemon at `socket`.
    ///
    /// # Errors
    /// When the system refuses what HTTP takes.
    pub fn new(socket: &Path, is_dry: bool) -> Result<Client, Error> {
        // Long work is asked for, too: an array is made in as long as its members take.
        let http = blocking::Client::builder().unix_socket(socket).timeout(None).build();
        let http = http.map_err(|error| Error::Runtime(format!("no HTTP: {error}")))?;
        Ok(Client { http, socket: socket.into(), is_dry })
    }

    /// Whether nothing is to be changed.
    pub fn is_dry(&self) -> bool {
        self.is_dry
    }

    /// Gets the object at a path.
    ///
    /// # Errors
    /// When the daemon does not answer, or there is no such object.
    pub fn get<T: DeserializeOwned>(&self, path: &[&str]) -> Result<T, Error> {
        self.parse(self.request(Method::GET, path, None)?)
    }

    /// Gets the selected objects of a list.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn list<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&'static str, String)],
    ) -> Result<Vec<T>, Error> {
        let mut url = url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let response = self.http.get(url).send().map_err(|error| self.silent(&error))?;
        self.parse(self.check(response)?)
    }

    /// Gets the object at a path, if it exists.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses.
    pub fn find<T: DeserializeOwned>(&self, path: &[&str]) -> Result<Option<T>, Error> {
        let response = self.http.get(url(path)).send().map_err(|error| self.silent(&error))?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            _ => self.parse(self.check(response)?).map(Some),
        }
    }

    /// Gets the object at a path within a time limit.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_within<T: DeserializeOwned>(&self, path: &[&str], time: Duration) -> Result<T, Error> {
        let response = self.http.get(url(path)).timeout(time).send().map_err(|error| self.silent(&error))?;
        self.parse(self.check(response)?)
    }

    /// The text at an address that is none of the API's.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn text(&self, path: &str) -> Result<String, Error> {
        let response = self.http.get(format!("{BASE}{path}")).send().map_err(|error| self.silent(&error))?;
        self.check(response)?.text().map_err(|error| self.silent(&error))
    }

    /// A long answer, as it comes.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn follow(&self, path: &[&str]) -> Result<BufReader<Response>, Error> {
        Ok(BufReader::new(self.request(Method::GET, path, None)?))
    }

    /// Has something changed; nothing if it was only to be said what.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses.
    pub fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: &impl Serialize,
    ) -> Result<Option<T>, Error> {
        let body = serde_json::to_value(body).expect("plain data");
        if self.is_dry {
            let _ = writeln!(std::io::stdout().lock(), "{method} {} {body}", url(path).path());
            return Ok(None);
        }
        self.parse(self.request(method, path, Some(body))?).map(Some)
    }

    /// Has something deleted.
    ///
    /// # Errors
    /// As [`Client::change`].
    pub fn delete(&self, path: &[&str], query: &[(&str, &str)]) -> Result<(), Error> {
        let mut url = url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        if self.is_dry {
            let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
            let _ = writeln!(std::io::stdout().lock(), "DELETE {}{query}", url.path());
            return Ok(());
        }
        let response = self.http.delete(url).send();
        self.check(response.map_err(|error| self.silent(&error))?).map(drop)
    }

    fn request(
        &self,
        method: Method,
        path: &[&str],
        body: Option<serde_json::Value>,
    ) -> Result<Response, Error> {
        let mut request = self.http.request(method, url(path));
        if let Some(body) = body {
            request = request.json(&body).header("prefer", "respond-async");
        }
        self.check(request.send().map_err(|error| self.silent(&error))?)
    }

    fn silent(&self, error: &reqwest::Error) -> Error {
        let mut cause: &dyn std::error::Error = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Error::Runtime(format!("freestoned does not answer at {}: {cause}", self.socket.display()))
    }

    fn check(&self, response: Response) -> Result<Response, Error> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        match response.json::<Problem>() {
            Ok(problem) => Err(Error::Runtime(problem.detail)),
            Err(_) => {
                Err(Error::Runtime(format!("freestoned at {} answers {status}", self.socket.display())))
            }
        }
    }

    fn parse<T: DeserializeOwned>(&self, response: Response) -> Result<T, Error> {
        response.json().map_err(|error| {
            Error::Runtime(format!("freestoned at {} sent an invalid answer: {error}", self.socket.display()))
        })
    }
}

/// The requested object, or the job that makes it: their fields tell them apart.
#[derive(serde::Deserialize)]
#[serde(untagged)]
pub enum Begun<T> {
    /// It takes longer.
    Job(Box<Job>),
    /// It is done.
    Done(T),
}

const BASE: &str = "http://freestoned";

/// The address of a path, whatever characters its parts have.
fn url(path: &[&str]) -> Url {
    let mut url = Url::parse(BASE).expect("it is one");
    url.path_segments_mut().expect("it has a host").push("v1").extend(path);
    url
}
