// Files that are attached: what may be attached here, read as data URLs, and the first frame of a video.

import { bytes, plural } from "./dom.js";

const PICTURES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const VIDEOS = new Set(["video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/matroska", "video/x-msvideo", "video/avi", "video/vnd.avi"]);
const POSTER_WIDTH = 480;
const POSTER_MS = 5000;

export const accepted = ({ max_videos }) => [...PICTURES, ...(max_videos ? VIDEOS : [])].join();

/** Why the file cannot be sent; "" where it can. `attached` goes along in the same request; `limits` are the server's, null where they are not known yet. */
export function problemOf(file, attached, limits) {
  const name = file.name || "That", kind = file.type.startsWith("video/") ? "video" : "image";
  const { max_images = 1, max_image_bytes = Infinity, max_videos = 1, max_video_bytes = Infinity, max_body_bytes = Infinity } = limits ?? {};
  const noun = kind === "video" ? "video" : "picture";
  const [most, size] = kind === "video" ? [max_videos, max_video_bytes] : [max_images, max_image_bytes];
  if (kind === "video" && !most) return max_images ? "This model takes no videos; send pictures instead." : "This model takes no videos.";
  if (!max_images && !max_videos) return "This model takes no pictures.";
  if (!PICTURES.has(file.type) && !VIDEOS.has(file.type)) {
    return `${name} is not a PNG, JPEG, WebP, GIF or BMP picture${max_videos ? ", nor an MP4, MOV, WebM, MKV or AVI video" : ""}.`;
  }
  if (file.size > size) return `${name} has ${bytes(file.size)}; a ${noun} may have ${bytes(size)} here.`;
  const number = attached.filter((other) => (other.kind ?? "image") === kind).length;
  if (limits && number >= most) {
    return `A conversation can have ${plural(most, noun)} here; begin a new chat, or remove one.`;
  }
  const total = attached.reduce((sum, { url }) => sum + url.length, 0) + (file.size * 4) / 3 + 10_000; // and some words
  return total > max_body_bytes ? `${name} does not fit: all of a conversation may have ${bytes(max_body_bytes)} here.` : "";
}

/** The file as it is sent and shown; null where it cannot be read. */
export async function attachmentOf(file) {
  const kind = file.type.startsWith("video/") ? "video" : "image";
  const url = await readFile(file);
  const name = file.name || `pasted ${kind === "video" ? "video" : "picture"}`;
  return url && { kind, name, size: file.size, url, ...(kind === "video" ? { poster: await posterOf(url) } : {}) };
}

export function readFile(file, how = "readAsDataURL") {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve(null);
    reader[how](file);
  });
}

/** An early frame as a small picture; "" where the browser cannot play the video. */
function posterOf(url) {
  return new Promise((resolve) => {
    const video = document.createElement("video");
    const finish = (poster) => {
      clearTimeout(timer);
      video.onerror = null;
      video.removeAttribute("src");
      resolve(poster);
    };
    const timer = setTimeout(() => finish(""), POSTER_MS);
    video.onerror = () => finish("");
    video.onloadeddata = () => { video.currentTime = Math.min(0.5, (video.duration || 0) / 2); };
    video.onseeked = () => {
      const width = Math.min(POSTER_WIDTH, video.videoWidth);
      const canvas = document.createElement("canvas");
      canvas.width = width;
      canvas.height = Math.round((width * video.videoHeight) / video.videoWidth);
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
      finish(canvas.width && canvas.height ? canvas.toDataURL("image/jpeg", 0.8) : "");
    };
    video.muted = true;
    video.preload = "auto";
    video.src = url;
  });
}
